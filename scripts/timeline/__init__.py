"""What `brigade timeline` makes of the spans that an engine recorded: numbers, a trace file, a picture."""

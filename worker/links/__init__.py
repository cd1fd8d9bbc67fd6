"""How activations get from one stage to the next: an interface, and one file per transport."""

"""Commands that a person starts. The only place where engine and worker meet; nobody imports it."""

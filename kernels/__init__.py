"""Ground floor of compute: functions on tensors, each beside the plain-torch definition of what it computes."""

"""Stand-ins that let code written for accelerators run on a CPU."""

"""Exchange between the GPUs of one host by copy engines: shared memory, pulls, pushes."""

"""Exchange between the GPUs of one host by copy engines and by kernels: shared memory, pulls, pushes, mailboxes."""

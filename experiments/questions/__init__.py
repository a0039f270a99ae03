"""What ``kvalloc run`` answers: one module per question, found by its name."""

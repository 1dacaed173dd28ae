"""What runs one task of a worker and answers those who read it."""

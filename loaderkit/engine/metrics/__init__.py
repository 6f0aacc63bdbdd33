"""What is measured, and what it means."""

"""Several ranks: how they meet, who owns which range, how they exchange bytes."""

"""The verdict on a loop that loads by something else, from what can be seen of it from outside."""

"""The verdict on a loop that loads without loaderkit, from what can be seen of it from outside."""

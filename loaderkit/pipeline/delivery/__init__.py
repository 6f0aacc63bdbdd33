"""What the loop gets: the iterator and its batches by number; and what is noted of batches as they are delivered."""

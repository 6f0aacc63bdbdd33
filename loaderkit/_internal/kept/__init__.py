"""What is kept between starts: files of arrays that processes share, and what tells that folders have not changed."""

"""What is kept between epochs: entries, where they lie, what is known of them, how fast their storage is."""

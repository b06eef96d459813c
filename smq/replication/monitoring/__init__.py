"""What a node counts and times, and what it finds that only a bug or a lying disk explains."""

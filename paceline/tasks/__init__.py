"""What the tasks of the loop do, and what they share (loop.py starts them)."""

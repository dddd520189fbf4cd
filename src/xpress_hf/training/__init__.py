"""Training of drafters: blocks cut at random anchors, losses in row chunks, and the trainer."""

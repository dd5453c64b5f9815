"""What attention does in a trained model, one file per question; analyze.py asks them."""

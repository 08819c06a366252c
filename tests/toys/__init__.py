"""Small methods that stand for what later methods need, and a small federation to run them on."""

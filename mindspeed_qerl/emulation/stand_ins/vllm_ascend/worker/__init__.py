"""The worker and its model runner."""

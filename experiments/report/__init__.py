"""``kvalloc report``: a folder of results as one HTML page."""

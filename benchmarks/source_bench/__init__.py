"""What each source of growth is worth where text repeats itself: requests, services, figures."""

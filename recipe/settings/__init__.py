"""What the user said, in flags and in JSON, made into one configuration or one list of everything wrong with it."""

"""Workers: admission, episode slots, inference engines, built-in workflows."""

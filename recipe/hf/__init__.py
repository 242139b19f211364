"""Models of the Hugging Face world: read into any layout, upcycled, exported, downloaded, uploaded."""

"""The two articles that this project grew from, claim by claim: each recomputed by a few lines, with a verdict."""

"""Text in, packed blocks of tokens out, in an order that one integer describes."""

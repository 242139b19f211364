"""What a layout would cost before any GPU is rented: bytes sent, memory, seconds. Never imports torch."""

"""What training has reached, in DeepSpeed's files or whole: saved, read in any layout, inspected, written anew."""

"""What tests of this library, and of what is built on it, can stand on."""

"""What is wrong with a server or a build, why, and the next command."""

"""The base of every package: errors, console, files, processes, git, docker. Imports no other package of ours."""

"""What every package uses: errors, console, files, processes, git, docker. Imports no other package of ours."""

"""The engine in several other processes, wherever they run. Which process makes which batch is arithmetic; processes
that die are replaced."""

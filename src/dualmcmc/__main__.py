"""python -m dualmcmc."""

from dualmcmc.cli import main

main()

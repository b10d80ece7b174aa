"""Reconstruction: update the surviving weights so that a unit meets its target again."""

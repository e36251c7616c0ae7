"""Runs and their statistics: what is better, and could it be luck?"""

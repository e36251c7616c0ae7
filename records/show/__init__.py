"""Boards, pages and models for others."""

"""Scenes of coloured shapes, and a small image-text model that learns to describe them with a bias."""

"""The commands: each file here is one, called like the file; its
``command`` is a function, or a ``typer.Typer`` of several.
"""

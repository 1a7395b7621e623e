"""How models ask for tools: the forms that their templates teach, read from streamed text."""

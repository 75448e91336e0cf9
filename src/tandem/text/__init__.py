"""Tokenizers and chat rendering: text is a view of tokens, and only new messages are ever rendered."""

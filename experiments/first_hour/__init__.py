"""The first hour on an accelerator: is it right, how fast is it, and what does it need?"""

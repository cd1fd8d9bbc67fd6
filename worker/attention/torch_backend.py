"""How does plain torch attend over a paged cache?"""

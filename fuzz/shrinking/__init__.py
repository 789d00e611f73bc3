"""What the shrinker tries: a case in its parts, the proposals made of it, and its size."""

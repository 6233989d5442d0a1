"""The claims of the field, each reproduced and each broken by one changed assumption."""

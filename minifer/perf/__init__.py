"""What a step costs, on paper and measured."""

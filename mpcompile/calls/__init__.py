"""What a call of a compiled module runs"""

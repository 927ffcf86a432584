from .transport import hash_of
class Disagreement(ValueError):
    field = "calibration"; call=""; values={}

print("V", V1[:10].tolist(), V1.norm().item(), "dO", D.norm().item(), D[:6].tolist())

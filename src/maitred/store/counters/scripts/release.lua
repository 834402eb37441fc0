-- Gives back all slices of a gateway that leaves. Returns {'released'}.
local refusal = barred(false)
if refusal then return refusal end
release_slices(call.gateway)
save()
return cmsgpack.pack({'released'})

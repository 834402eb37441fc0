-- Gives back all slices of gateways that have ended, of which all settlements are here. Returns {'released'}.
local refusal = barred(false)
if refusal then return refusal end
for _, gateway in ipairs(call.ended) do release_slices(gateway, false) end
save()
return cmsgpack.pack({'released'})

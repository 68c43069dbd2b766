// Modules that importance does not judge: an expert's gradients say how often it was routed to of late, an embedding's
// and a norm's say little beside a matrix's, and all of them are needed at every step, or without warning.
#pragma once

#include <string>
#include <vector>

namespace misa::guard {

// A matrix of one of a layer's experts, by its parameters' name ("…experts.3.w1", "…expert_0.fc2").
bool IsExpert(const std::string& name);
// What pins go by: "expert", else the module's kind ("embedding", "norm", "head", "attention.query", …); small tensors
// that ride with their block, which norms and biases do, are "norm" too.
std::string PinKind(const std::string& name, const std::string& kind);
// expert, embedding, norm
const std::vector<std::string>& DefaultPins();
// `pins` are kinds (PinKind or the module's own) or names of modules.
bool IsPinned(const std::string& name, const std::string& kind, const std::vector<std::string>& pins);

}  // namespace misa::guard

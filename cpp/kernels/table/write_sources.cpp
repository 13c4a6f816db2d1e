// Writes the source files of the tables' kernels, and the function that lists them. CMake runs it when it configures,
// and knows no kernel:
//
//   write_sources cpu DIR [isas=] [FLASHSDK_CPU_DTYPES=] [FLASHSDK_CPU_HEAD_DIMS=]
//   write_sources gpu DIR [CMAKE_CUDA_ARCHITECTURES=] [FLASHSDK_CUDA_SUBSET=] [FLASHSDK_CUDA_DTYPES=]
//                         [FLASHSDK_CUDA_HEAD_DIMS=]
//
// Values are lists with commas; isas are slowest first. What dtypes and head dims do not name is left out; an empty
// list leaves out nothing. It prints a line a file, "target file"; a file is written only where it changes, so that
// configuring again compiles nothing. Bad arguments are one line on stderr and exit status 1.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "table/check.h"
#include "table/cpu.h"
#include "table/sm80.h"
#include "table/sm90.h"

namespace flashsdk::table {
namespace {

using Strings = std::vector<std::string>;

[[noreturn]] void fail(const std::string& argument, const std::string& given, const std::string& allowed) {
  std::fprintf(stderr, "%s: %s; allowed here are %s\n", argument.c_str(), given.c_str(), allowed.c_str());
  std::exit(1);
}

Strings split(const std::string& list) {
  Strings items;
  std::istringstream text(list);
  for (std::string item; std::getline(text, item, ',');) items.push_back(item);
  return items;
}

std::string join(const Strings& items, const char* between) {
  std::string text;
  for (const std::string& item : items) text += (text.empty() ? "" : between) + item;
  return text;
}

// Those of `all` that `list` names, in the order of `all`; the whole of it for an empty list.
template <class T, class Name>
std::vector<T> chosen(const char* argument, const std::string& list, const std::vector<T>& all, Name name) {
  if (list.empty() || list == "all") return all;
  Strings names;
  for (const T& item : all) names.push_back(name(item));
  const Strings asked = split(list);
  for (const std::string& item : asked)
    if (std::find(names.begin(), names.end(), item) == names.end()) fail(argument, item, join(names, " "));
  std::vector<T> result;
  for (std::size_t i = 0; i < all.size(); ++i)
    if (std::find(asked.begin(), asked.end(), names[i]) != asked.end()) result.push_back(all[i]);
  return result;
}

void write(const std::filesystem::path& path, const std::string& text) {
  std::ifstream old(path, std::ios::binary);
  if (old && std::string(std::istreambuf_iterator<char>(old), {}) == text) return;
  std::filesystem::create_directories(path.parent_path());
  if (!(std::ofstream(path, std::ios::binary) << text)) fail("DIR", path.string(), "files that can be written");
}

const char* cpu_name(DType t) { return t == DType::kFloat32 ? "fp32" : t == DType::kBFloat16 ? "bf16" : "fp16"; }
const char* cpu_type(DType t) {
  return t == DType::kFloat32 ? "float" : t == DType::kBFloat16 ? "cpu::Bf16" : "cpu::Fp16";
}
const char* gpu_name(DType t) { return t == DType::kFloat16 ? "float16" : "bfloat16"; }
const char* gpu_type(DType t) { return t == DType::kFloat16 ? "cutlass::half_t" : "cutlass::bfloat16_t"; }

const char* name_of(Features f) {
  switch (f) {
    case kNone:
      return "None";
    case kDropout:
      return "Dropout";
    case kCapped:
      return "Capped";
    case kAlibi:
      return "Alibi";
    case kBias:
      return "Bias";
    case kBiasDropout:
      return "BiasDropout";
    default:
      return "All";
  }
}
constexpr MaskKind kMaskKinds[] = {MaskKind::kDense, MaskKind::kBand, MaskKind::kBlockSparse};
std::string name_of(MaskKind kind) {
  return kind == MaskKind::kDense ? "Dense" : kind == MaskKind::kBand ? "Band" : "BlockSparse";
}
std::string text_of(HeadDims d) { return std::to_string(d.qk) + (d.v == d.qk ? "" : "x" + std::to_string(d.v)); }
std::string text_of(Tile t) { return std::to_string(t.m) + "x" + std::to_string(t.n); }

// An array of entries, and the generated file that it is in. Those of a file have the same target and includes.
struct Source {
  std::string target, file, name;
  bool backward;
  std::string includes, declared;  // ahead of namespace flashsdk, and in it
  Strings entries;
  std::string storage = "const";
};

// The files of one table, and the lines of the function that lists their kernels, first the one that is asked first.
class Sources {
 public:
  explicit Sources(std::filesystem::path directory) : directory_(std::move(directory)) {}

  void add(const Source& s) {
    const std::string array = std::string(s.backward ? "BackwardEntry " : "ForwardEntry ") + s.name + "[" +
                              std::to_string(s.entries.size()) + "]";
    File& file = files_[s.file];
    file.target = s.target;
    file.includes = s.includes;
    file.body += (file.body.empty() ? "" : "\n") + s.declared + "extern const " + array + ";\n" + s.storage + " " +
                 array + " = {\n    " + join(s.entries, ",\n    ") + "};\n";
    declarations_ += "extern const " + array + ";\n";
    calls_ += "  for (const auto& entry : " + s.name + ") table.add(entry);\n";
  }

  // Writes them, and the function that lists all of their kernels.
  void put(const std::string& name, const std::string& function, const std::string& includes,
           const std::string& declared, const std::string& more_calls) {
    files_[name] = {"table", includes,
                    declared + declarations_ + "\nvoid " + function + "(KernelTable& table);\nvoid " + function +
                        "(KernelTable& table) {\n" + calls_ + more_calls + "}\n"};
    for (const auto& [name, file] : files_) {
      write(directory_ / name, "// Written by cpp/kernels/table/write_sources.cpp.\n" + file.includes +
                                   "\nnamespace flashsdk {\n\n" + file.body + "\n}  // namespace flashsdk\n");
      std::printf("%s %s\n", file.target.c_str(), name.c_str());
    }
  }

 private:
  struct File {
    std::string target, includes, body;
  };

  std::filesystem::path directory_;
  std::map<std::string, File> files_;
  std::string declarations_, calls_;
};

void write_cpu(const std::string& directory, const Strings& isas, const std::vector<DType>& dtypes,
               const std::vector<int>& head_dims) {
  Sources sources(directory);
  for (auto isa = isas.rbegin(); isa != isas.rend(); ++isa)  // the fastest is asked first
    for (const DType dtype : dtypes) {
      if (!cpu_has(*isa, dtype)) continue;
      for (const std::string op : {"forward", "backward"}) {
        Strings entries;
        for (const int head_dim : head_dims)
          for (const MaskKind mask : kMaskKinds)
            for (const Features f : kCpuFeatures) {
              if (!cpu_has(head_dim, f)) continue;
              entries.push_back(op + "_entry<" + cpu_type(dtype) + ", " + std::to_string(head_dim) + ", " +
                                name_of(mask) + "Policy, " + (f == kNone ? "false" : "true") + ">()");
            }
        // Data, not a function: on a machine without the instruction set no code of this file may run.
        const std::string name = "cpu_" + *isa + "_" + cpu_name(dtype) + "_" + op;
        sources.add({.target = *isa,
                     .file = name + ".cpp",
                     .name = name,
                     .backward = op == "backward",
                     .includes = "#define FLASHSDK_ISA_NS " + *isa + "\n#include \"cpu/" + op + ".h\"\n",
                     .declared = "using namespace cpu::" + *isa + ";\n",
                     .entries = entries,
                     .storage = "constinit const"});
      }
    }
  sources.put("kernel_table.cpp", "add_all_kernels", "#include \"common/kernel_entry.h\"\n",
              "#if FLASHSDK_HAVE_CUDA\nvoid add_cuda_kernels(KernelTable& table);\n#endif\n",
              "#if FLASHSDK_HAVE_CUDA\n  add_cuda_kernels(table);\n#endif\n");
}

// What of the tables is compiled.
struct Wanted {
  bool few;  // of every kind of kernel, for CI: a head_dim, and what asks for less of the same code left out
  std::vector<DType> dtypes;
  std::vector<int> head_dims;

  bool has(HeadDims d) const { return std::find(head_dims.begin(), head_dims.end(), d.qk) != head_dims.end(); }
  Masks of(Masks masks) const { return static_cast<Masks>(few ? masks & kBandOrLayout : masks); }
};

// A row as a type, which templates take: nvcc cannot spell values of a class among the arguments of a kernel.
std::string row_type(const std::string& name, const char* table, std::ptrdiff_t index) {
  return "struct Row_" + name + " {\n  static constexpr auto kRow = table::" + table + "[" + std::to_string(index) +
         "];\n};\n";
}

// The templates of sm80/traits.h and sm80/launch.h that make entries of rows.
struct Templates {
  std::string traits, entry;
};

// A file has the kernels of a tile, of all dtypes, sets of features and masks: most of what they take to compile is
// CuTe's layouts, which are the same for all. Of head_dim 64 four sets take 53 s in one file, 162 in four; both dtypes
// take an eighth to a third less than in two. nvcc also compresses the code of a file as one, to three fifths here.
template <class Row, std::size_t kRows>
void add_sm80(Sources& sources, const Wanted& wanted, int head_dim, const std::string& op, const Templates& of,
              const char* table, const Row (&rows)[kRows]) {
  for (const DType dtype : wanted.dtypes)
    for (const bool any_alignment : {false, true})
      for (const Features f : kSm80Sets)
        for (const Row& row : rows) {
          if (built_with(row.head_dim) != head_dim || row.any_alignment != any_alignment) continue;
          if (wanted.few && (f == kDropout || row.tile.m * row.tile.n == 16 * 16)) continue;
          const char* features = any_alignment ? "Any" : name_of(f);
          const std::string d = "_d" + text_of(row.head_dim) + "_", tile = text_of(row.tile);
          const std::string name = "sm80_" + op + "_" + gpu_name(dtype) + d + features + "_" + tile;
          Strings entries;
          for (const MaskKind mask : kMaskKinds)
            if (has(wanted.of(row.kernels.of(f)), mask))
              entries.push_back("sm80::" + of.entry + "<Traits_" + name + ", " + name_of(mask) + "Policy, Features::k" +
                                name_of(f) + ">()");
          if (entries.empty()) continue;
          sources.add({.target = "sm80",
                       .file = "sm80_" + op + d + tile + ".cu",
                       .name = name,
                       .backward = op == "backward",
                       .includes = "#include \"sm80/launch.h\"\n",
                       .declared = row_type(name, table, &row - rows) + "using Traits_" + name +
                                   " = sm80::" + of.traits + "<Row_" + name + ", " + gpu_type(dtype) + ">;\n",
                       .entries = entries});
        }
}

// Whether CI leaves out kernels with these features: others ask for more of the same code.
template <class Row, std::size_t kRows>
bool has_more(const Row (&rows)[kRows], HeadDims head_dim, Features f, bool backward) {
  if (backward && f == kNone) return true;
  if (f != kBias) return false;
  for (const Row& row : rows)
    if (row.head_dim == head_dim && row.kernels.of(kBiasDropout) != 0) return true;
  return false;
}

// A file has what one of sm80's has.
template <class Row, std::size_t kRows>
void add_sm90(Sources& sources, const Wanted& wanted, HeadDims head_dim, const std::string& op, const char* table,
              const Row (&rows)[kRows]) {
  const bool backward = op == "backward";
  for (const DType dtype : wanted.dtypes)
    for (const Features f : kSm90Sets) {
      if (wanted.few && has_more(rows, head_dim, f, backward)) continue;
      for (const Row& row : rows) {
        if (row.head_dim != head_dim || row.kernels.of(f) == 0) continue;
        const std::string d = "_d" + text_of(row.head_dim) + "_", tile = text_of(row.tile);
        const std::string name = "sm90_" + op + "_" + gpu_name(dtype) + d + name_of(f) + "_" + tile;
        // Some of what ptxas does with a kernel depends on its name: with traits that are a struct it orders the
        // forward's loop at head_dim 128 as in the fastest kernels measured (docs/dev/log-sm90-forward.md, version 14:
        // ptxas's luck). The backward's kernels were measured under the long names that an alias gives them.
        const std::string features = std::string("Features::k") + name_of(f);
        const std::string traits = backward ? "using Traits_" + name + " = sm90::BackwardTraitsOf<Row_" + name + ", " +
                                                  features + ", " + gpu_type(dtype) + ">;\n"
                                            : "struct Traits_" + name + " : sm90::ForwardTraits<Row_" + name + ", " +
                                                  gpu_type(dtype) + "> {};\n";
        Strings entries;
        for (const MaskKind mask : kMaskKinds)
          entries.push_back("sm90::" + op + "_entry<Traits_" + name + ", " + features + ">(MaskKind::k" +
                            name_of(mask) + ")");
        sources.add(
            {.target = "sm90",
             .file = "sm90_" + op + d + tile + ".cu",
             .name = name,
             .backward = backward,
             .includes = std::string(extends_wgmma(row) ? "#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED\n" : "") +
                         "#include \"sm90/" + op + "/launch.h\"\n",
             .declared = row_type(name, table, &row - rows) + traits,
             .entries = entries});
        if (wanted.few) break;  // one tile
      }
    }
}

void write_gpu(const std::string& directory, const Strings& architectures, const Wanted& wanted) {
  Sources sources(directory);
  const bool sm90 = join(architectures, " ").find("90a") != std::string::npos;
  const auto first_with = [](HeadDims head_dim) {
    return std::find_if(std::begin(kSm90Backward), std::end(kSm90Backward),
                        [&](const Sm90Backward& row) { return row.head_dim == head_dim; });
  };
  if (sm90)
    for (const Sm90Backward& row : kSm90Backward) {
      if (!wanted.has(row.head_dim) || first_with(row.head_dim) != &row) continue;
      add_sm90(sources, wanted, row.head_dim, "forward", "kSm90Forward", kSm90Forward);
      add_sm90(sources, wanted, row.head_dim, "backward", "kSm90Backward", kSm90Backward);
    }
  for (const int head_dim : wanted.head_dims) {
    const Templates forward{"ForwardTraitsOf", "forward_entry"}, backward{"BackwardTraitsOf", "backward_entry"};
    const Templates split{"ForwardTraitsOf", "split_forward_entry"};
    const Templates fp8{"Fp8ForwardTraitsOf", "fp8_forward_entry"};
    const Templates few_rows{"FewRowsTraitsOf", "split_forward_entry"};
    const Templates fp8_few_rows{"Fp8FewRowsTraitsOf", "split_forward_entry"};
    add_sm80(sources, wanted, head_dim, "forward", forward, "kSm80Forward", kSm80Forward);
    add_sm80(sources, wanted, head_dim, "few_rows_forward", few_rows, "kSm80FewRowsForward", kSm80FewRowsForward);
    add_sm80(sources, wanted, head_dim, "split_forward", split, "kSm80SplitForward", kSm80SplitForward);
    add_sm80(sources, wanted, head_dim, "backward", backward, "kSm80Backward", kSm80Backward);
    add_sm80(sources, wanted, head_dim, "fp8_forward", fp8, "kSm80Fp8Forward", kSm80Fp8Forward);
    add_sm80(sources, wanted, head_dim, "fp8_split_forward", fp8_few_rows, "kSm80Fp8SplitForward",
             kSm80Fp8SplitForward);
  }
  sources.put("cuda_table.cpp", "add_cuda_kernels",
              "#include \"common/kernel_entry.h\"\n#include \"cuda/host/device.h\"\n",
              "const char* cuda::built_architectures() { return \"" + join(architectures, " ") + "\"; }\n\n", "");
}

int run(const Strings& arguments) {
  const auto number = [](int d) { return std::to_string(d); };
  std::map<std::string, std::string> given;
  for (std::size_t i = 2; i < arguments.size(); ++i) {
    const std::size_t equals = arguments[i].find('=');
    given[arguments[i].substr(0, equals)] = equals == std::string::npos ? "" : arguments[i].substr(equals + 1);
  }
  const auto of = [&](const char* name, const auto& all, auto name_of_item, const char* otherwise = "") {
    const std::string list = given[name].empty() ? otherwise : given[name];
    return chosen(name, list, std::vector(std::begin(all), std::end(all)), name_of_item);
  };
  const std::string table = arguments.size() < 2 ? "" : arguments[0];
  if (table == "cpu") {
    write_cpu(arguments[1], split(given["isas"]), of("FLASHSDK_CPU_DTYPES", kCpuDTypes, cpu_name),
              of("FLASHSDK_CPU_HEAD_DIMS", kCpuHeadDims, number));
  } else if (table == "gpu") {
    const std::string& subset = given["FLASHSDK_CUDA_SUBSET"];
    const bool few = subset == "ci";
    if (!few && subset != "all") fail("FLASHSDK_CUDA_SUBSET", subset, "all ci");
    write_gpu(arguments[1], split(given["CMAKE_CUDA_ARCHITECTURES"]),
              {few, of("FLASHSDK_CUDA_DTYPES", kGpuDTypes, gpu_name, few ? "bfloat16" : ""),
               of("FLASHSDK_CUDA_HEAD_DIMS", kGpuHeadDims, number, few ? "64" : "")});
  } else {
    fail("table", table, "cpu gpu");
  }
  return 0;
}

}  // namespace
}  // namespace flashsdk::table

int main(int argc, char** argv) { return flashsdk::table::run({argv + 1, argv + argc}); }
